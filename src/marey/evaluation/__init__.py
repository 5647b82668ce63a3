"""What was learned: features, probes, pictures, report."""
