"""Plans on an emulated cluster: what was predicted against what real processes over real, shaped
links took."""
