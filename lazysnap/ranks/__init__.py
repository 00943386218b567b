"""The ranks of a training: what each of them captures, and what they tell each other, never per snapshot."""
