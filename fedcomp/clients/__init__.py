"""The client: the session that trains and encodes updates, and the state between rounds. No module here depends on a transport."""
