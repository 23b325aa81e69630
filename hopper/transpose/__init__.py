"""V of e4m3 in rows, turned into the columns that FP8 WGMMA wants."""
