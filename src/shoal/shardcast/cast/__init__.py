"""What `shoal cast` does: broadcast any file or folder, without a run, a hub or torch.

trust      which key and which broadcast a URL stands for, and what was believed before
publish    write the next version into a folder and serve it
fetch      bring a version here, resumable; let others take it from here
delivery   put what was fetched where it belongs
relay      mirror a broadcast
serving    how those who serve are reached; Terminal: what they tell
"""
