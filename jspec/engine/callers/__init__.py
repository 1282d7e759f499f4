"""The calls of users, and the threads and tasks that wait for results."""
