"""The endpoint of `decode.serve`: what requests may say, the thread that decodes them, and the routes."""
