"""Text as token shards."""
