"""Training drafters: anchors, the draft-verify-draft step, losses and the trainer."""
