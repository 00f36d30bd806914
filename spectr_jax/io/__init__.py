"""Files of models and tokenizers."""
