"""Authentication and authorization: users, access lists, the permission of each request."""
