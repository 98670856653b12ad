"""`selfspec verify --server URL`: does a server's text depend on how it is asked? For any server of OpenAI's API.

`plan` says in which ways the same prompts are sent, `client` sends a request, `company` sends several at once, `forks` finds
where two texts part, `judging` compares, `findings` holds what was found, and `screen` prints it.
"""
