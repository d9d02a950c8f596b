"""What the keys of a Hugging Face config mean, one module per kinship of models."""
