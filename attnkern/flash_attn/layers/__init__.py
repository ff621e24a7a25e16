"""Of flash_attn.layers: rotary."""
