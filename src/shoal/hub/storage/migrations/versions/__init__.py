"""One file for each schema, in order. Names begin with the revision; none is changed once it was released."""
