"""Read the keys of a Hugging Face config, one module per family of models.

Start reading at ``config``.
"""
