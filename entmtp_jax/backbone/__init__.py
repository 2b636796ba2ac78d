"""The model that verifies: Llama-family decoders as pure functions of parameters, tokens and cache."""
