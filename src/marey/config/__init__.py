"""The typed schema behind the YAML: every key, its unit, its check, its error."""
