"""Checkpoints of one training, from early to late: does the order of the policies hold as the model gets better?"""
