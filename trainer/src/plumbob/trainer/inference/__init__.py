"""The engines that sample completions, and how trained weights reach them."""
