"""Bounds from counting what each unit of the chip must do."""
