"""The client: the session that trains and sends updates, and the state between rounds. No module here depends on a transport."""
