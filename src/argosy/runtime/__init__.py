"""What happens: a plan carried out on torch.distributed, measured as it runs. Importing this alone needs no torch."""
