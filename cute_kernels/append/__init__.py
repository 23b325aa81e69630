"""New keys and values into a cache, rotated on the way, and the queries that come with them."""
