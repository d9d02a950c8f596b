"""What is to be computed: layer chains from configs, presets and measured profiles."""
