"""Stored latent videos: manifests, sidecars, codecs, text embeddings and the samples made from them."""
