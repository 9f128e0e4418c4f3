//! Cached folders that are complete or absent: filled beside their place, sealed with checksums, then moved there.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::shell::step;

/// How the names of folders begin that are being filled.
const FILLING: &str = ".filling-";

/// The file that seals a folder.
const SEAL: &str = "seal.json";

#[derive(Serialize, Deserialize)]
struct Seal<T> {
    /// SHA-256 of each file that stands directly in the folder.
    files: BTreeMap<String, String>,
    /// What the maker of the folder wants to know about it later.
    note: T,
}

/// Opens a sealed folder; `None` when it is absent or a file in it is not what was sealed.
pub(crate) fn open<T: DeserializeOwned>(folder: &Path) -> Option<T> {
    let text = fs::read_to_string(folder.join(SEAL)).ok()?;
    match check(folder, &text) {
        Ok(note) => Some(note),
        Err(error) => {
            step(&format!("not using {}: {error:#}", folder.display()));
            None
        }
    }
}

fn check<T: DeserializeOwned>(folder: &Path, seal: &str) -> Result<T> {
    let seal: Seal<T> = serde_json::from_str(seal).context("its seal cannot be read")?;
    for (name, expected) in &seal.files {
        if hash(&folder.join(name))? != *expected {
            bail!("{name} is damaged");
        }
    }
    Ok(seal.note)
}

/// Makes a sealed folder: `fill` gets an empty folder beside its place and returns the note.
///
/// # Errors
/// When `fill` fails or the folder cannot be written; then nothing stands in its place.
pub(crate) fn make<T: Serialize>(folder: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let parent = folder.parent().context("a cached folder has a parent")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    remove_leftovers(parent)?;
    let work = tempfile::Builder::new()
        .prefix(FILLING)
        .tempdir_in(parent)
        .with_context(|| format!("cannot make a folder in {}", parent.display()))?;
    let note = fill(work.path())?;

    let mut files = BTreeMap::new();
    for entry in fs::read_dir(work.path())? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let name = entry.file_name().to_string_lossy().into_owned();
            files.insert(name, hash(&entry.path())?);
        }
    }
    let seal = Seal { files, note };
    fs::write(work.path().join(SEAL), serde_json::to_vec_pretty(&seal)?)?;

    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot replace {}", folder.display()))?;
    }
    let path = work.keep();
    fs::rename(&path, folder)
        .with_context(|| format!("cannot move {} to {}", path.display(), folder.display()))?;
    Ok(seal.note)
}

/// Removes what a killed run was filling; the lock on the cache keeps other runs away.
fn remove_leftovers(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(FILLING) {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

fn hash(path: &Path) -> Result<String> {
    use std::fmt::Write as _;
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        hasher.update(&buffer[..length]);
    }
    let mut text = String::with_capacity(64);
    for byte in hasher.finalize() {
        write!(text, "{byte:02x}")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(folder: &Path) {
        make(folder, |work| {
            fs::write(work.join("file"), "content")?;
            Ok("note".to_owned())
        })
        .expect("a sealed folder");
    }

    #[test]
    fn a_sealed_folder_opens_and_a_damaged_one_does_not() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("sealed");
        assert_eq!(open::<String>(&folder), None);
        sealed(&folder);
        assert_eq!(open::<String>(&folder).as_deref(), Some("note"));
        fs::write(folder.join("file"), "other").expect("write");
        assert_eq!(open::<String>(&folder), None);
        sealed(&folder);
        assert_eq!(open::<String>(&folder).as_deref(), Some("note"));
        fs::remove_file(folder.join("file")).expect("remove");
        assert_eq!(open::<String>(&folder), None);
    }

    #[test]
    fn what_failed_leaves_nothing() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join("sealed");
        let result = make(&folder, |work| -> Result<()> {
            fs::write(work.join("file"), "half")?;
            bail!("no")
        });
        assert!(result.is_err());
        assert_eq!(fs::read_dir(parent.path()).expect("a folder").count(), 0);
    }

    #[test]
    fn what_a_killed_run_left_is_removed() {
        let parent = tempfile::tempdir().expect("a folder");
        fs::create_dir(parent.path().join(".filling-old")).expect("a folder");
        sealed(&parent.path().join("sealed"));
        assert!(!parent.path().join(".filling-old").exists());
    }

    #[test]
    fn hashes_are_sha256() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), "abc").expect("write");
        assert_eq!(
            hash(file.path()).expect("a hash"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
