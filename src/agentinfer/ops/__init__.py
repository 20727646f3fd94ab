"""How to compute it: torch functions that take all they need as arguments. Knows records and tensors, no scheduling."""
