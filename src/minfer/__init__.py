"""minfer: run GGUF language models."""
