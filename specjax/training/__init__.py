"""Losses and batches that drafters are trained with."""
