//! Initial file systems of guests: cpio archives in the kernel's "newc" form, owned by root, the same bytes for the same content.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use cpio::newc::{Builder, trailer};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive that is being written. Several whole archives one after the other are one initial file system.
pub(crate) struct Archive<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size = u32::try_from(data.len())
            .map_err(|_| io::Error::other(format!("{path} is larger than 4 GiB")))?;
        let mut writer = Builder::new(path)
            .ino(self.inode)
            .mode(mode)
            .nlink(1)
            .rdev_major(device.0)
            .rdev_minor(device.1)
            .write(&mut self.out, size);
        writer.write_all(data)?;
        writer.finish().map(drop)
    }

    /// Adds an empty folder.
    pub(crate) fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a file with these permission bits.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | (permissions & 0o7777), (0, 0), data)
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// Adds a file of this machine.
    ///
    /// # Errors
    /// When the file cannot be read or the archive cannot be written.
    pub(crate) fn copy(&mut self, source: &Path, path: &str) -> Result<()> {
        let data = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        let permissions = source.metadata()?.permissions().mode();
        self.file(path, permissions, &data)?;
        Ok(())
    }

    /// Adds what is in a folder, for paths inside it that `keep` accepts, below `at`, which is empty or ends with a slash;
    /// links are kept as links.
    ///
    /// # Errors
    /// When the folder cannot be read or the archive cannot be written.
    pub(crate) fn tree(&mut self, root: &Path, at: &str, keep: &dyn Fn(&str) -> bool) -> Result<()> {
        self.subtree(root, at, "", keep)
    }

    fn subtree(&mut self, root: &Path, at: &str, inside: &str, keep: &dyn Fn(&str) -> bool) -> Result<()> {
        let folder = root.join(inside);
        let mut entries = fs::read_dir(&folder)
            .and_then(Iterator::collect::<io::Result<Vec<_>>>)
            .with_context(|| format!("cannot read {}", folder.display()))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if inside.is_empty() {
                name
            } else {
                format!("{inside}/{name}")
            };
            if !keep(&path) {
                continue;
            }
            let kind = entry.file_type()?;
            let archived = format!("{at}{path}");
            if kind.is_dir() {
                self.directory(&archived)?;
                self.subtree(root, at, &path, keep)?;
            } else if kind.is_symlink() {
                let target = fs::read_link(entry.path())?;
                self.symlink(&archived, &target.to_string_lossy())?;
            } else {
                self.copy(&entry.path(), &archived)?;
            }
        }
        Ok(())
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn finish(self) -> io::Result<W> {
        let mut out = trailer(self.out)?;
        out.flush()?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpio::NewcReader;
    use std::io::Read as _;

    #[test]
    fn entries_come_back_as_they_were_written() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("sub")).expect("a folder");
        fs::write(folder.path().join("sub/kept"), "kept").expect("write");
        fs::write(folder.path().join("left"), "left").expect("write");
        std::os::unix::fs::symlink("sub/kept", folder.path().join("link")).expect("a link");

        let mut archive = Archive::new(Vec::new());
        archive.file("init", 0o755, b"program").expect("a file");
        archive.device("null", 1, 3).expect("a device");
        archive
            .tree(folder.path(), "", &|path| path != "left")
            .expect("a tree");
        let bytes = archive.finish().expect("an archive");
        assert_eq!(bytes.len() % 4, 0);

        let mut rest = &bytes[..];
        let mut seen = Vec::new();
        loop {
            let mut reader = NewcReader::new(rest).expect("an entry");
            if reader.entry().is_trailer() {
                break;
            }
            let name = reader.entry().name().to_owned();
            let mode = reader.entry().mode();
            let mut data = String::new();
            reader.read_to_string(&mut data).expect("data");
            seen.push((name, mode, data));
            rest = reader.finish().expect("the next entry");
        }
        let expected = [
            ("init", 0o100_755, "program"),
            ("null", 0o020_600, ""),
            ("link", 0o120_777, "sub/kept"),
            ("sub", 0o040_755, ""),
            ("sub/kept", 0o100_644, "kept"),
        ];
        let expected: Vec<_> = expected
            .map(|(name, mode, data)| (name.to_owned(), mode, data.to_owned()))
            .into();
        assert_eq!(seen, expected);
    }
}
