"""The decoder, and the way in and out of Hugging Face's layout."""
