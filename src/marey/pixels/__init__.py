"""Video files -> frames -> frame store -> clips -> views. Knows nothing of models."""
