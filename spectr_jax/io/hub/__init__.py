"""Checkpoints of real models: hub folders and GGUF files, with their tokenizers and chat templates."""
