"""Who works when inside a CTA."""
