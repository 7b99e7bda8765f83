"""The products and goals of a shop: read, made into a folder, and opened from it."""
