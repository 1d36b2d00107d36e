"""The training loop: optimizer step, reduction over ranks, checkpoints, tracking."""
