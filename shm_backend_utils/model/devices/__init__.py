"""What a model does with GPUs."""
