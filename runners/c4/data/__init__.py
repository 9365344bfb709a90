"""A corpus of text as token shards."""
