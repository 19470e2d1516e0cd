"""Data: prompts, the target's recorded responses, and the packed token sequences that drafters are trained on."""
