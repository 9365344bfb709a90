"""The command that trains the reference results, and their overview; ``runners.mad.rows`` names and reads them."""
