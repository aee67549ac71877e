"""The stacked engine's parts: networks over stacked weights, the lock-step loop, its memory."""
