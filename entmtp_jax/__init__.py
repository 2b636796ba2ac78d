"""Entropy-guided multi-token-prediction decoding in JAX."""
