"""The supervised warm start: demonstrations in, a model that imitates them out, by the step that RL trains with.

reading     rows of files as conversations or text (Demonstrations), and their token ids (Encoder)
choosing    choose: rows through the filters, in one pass, into a Corpus; what became of each (Outcome); Course: which
            sequences each step is trained on, at which rate; the settings of [trainer] that count
training    WarmStart: the loop, its checkpoints and its export
"""
