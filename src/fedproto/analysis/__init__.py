"""Looking into trained models."""
