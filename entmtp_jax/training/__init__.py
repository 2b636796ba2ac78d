"""Training of heads on a frozen backbone: its own answers, its hidden states on disk, the loop, the measures."""
