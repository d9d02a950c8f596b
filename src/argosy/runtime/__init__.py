"""What happens: a plan carried out on torch.distributed, measured as it runs."""
