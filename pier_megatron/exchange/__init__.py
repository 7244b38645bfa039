"""What crosses the groups: who is in which group, collectives between them, numbers in fewer bits. No Megatron in here."""
