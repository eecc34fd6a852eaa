"""What `shoal cast` does: broadcast any file or folder, without a run, a hub or torch.

trust      which key and which broadcast a URL stands for, and what was believed before
publish    write the next version into a folder and serve it
fetch      bring a version here, resumable, and put it where it belongs
sharing    let others take from here what was fetched
relay      mirror a broadcast
meter      progress, for a terminal or for a log
"""
