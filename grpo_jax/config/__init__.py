"""Configuration: `GRPOConfig`, the batch sizes derived from it, and the validation of its fields."""
