"""What may be chosen: pools of equal devices, the options of a stage, and the rules that remove what cannot win."""
