"""Loading, forward passes, sampling and generation."""
