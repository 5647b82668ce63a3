"""What `marey export` copies beside the weights: code that runs without Marey."""
