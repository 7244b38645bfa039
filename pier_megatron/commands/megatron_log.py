"""What is read from Megatron's log."""

import re

PROGRESS = re.compile(r"iteration +(\d+)/ +(\d+) .*lm loss: ([\d.E+-]+)")
"""How far a training is: iterations done and in all, and the loss."""

VALIDATION = re.compile(r" validation\S* loss at .*? on validation set \| lm loss value: ([\d.E+-]+)")
"""The loss of one validation set, in nats per token: after a training, or of a run that only evaluates."""
