"""Other systems' names for programs written for them."""
